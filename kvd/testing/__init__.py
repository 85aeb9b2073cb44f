"""Shipped for whoever tests against kvd or embeds it."""

import sys

if pytest := sys.modules.get("pytest"):
    # Without it a suite that finds a fault would not show which values it found.
    pytest.register_assert_rewrite("kvd.testing.tier_suite")
