"""Jobs: work that outlasts a request, done once even where the process that does it is killed."""
