"""Files, threads, deadlines, sockets and imports: what knows nothing of reinforcement learning."""
