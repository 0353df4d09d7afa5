"""Plans of all planners, executed over slow links: who is fastest, and how near predictions come."""
