"""Files, threads, deadlines, sockets and imports: everything that knows nothing of reinforcement learning."""
