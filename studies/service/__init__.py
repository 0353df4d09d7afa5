"""How the REST service holds up: latencies at given rates, lists of many plans, and more requests than it can do."""
