"""Everything that one GPU can tell within its minutes: `python -m studies gpu --minutes 9 -o DIR`."""
