"""What both ends must agree on: messages, errors, identity, layout. No torch, no zmq, no await."""
