"""Memory that both ends map: pages, what the daemon notes about them, who may hold them."""
