"""Commands that come before all others: what is installed, and files to start from."""
