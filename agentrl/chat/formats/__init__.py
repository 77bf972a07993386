"""Chat formats: turns and tool calls as chat templates and model families write them."""
