"""How chat templates and model families write turns and tool calls."""
