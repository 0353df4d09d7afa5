"""How policies are trained: tasks, labels of searches, learning, and the command."""
