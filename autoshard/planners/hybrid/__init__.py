"""One search over every way to hold a table, by predicted steps under memory limits."""
