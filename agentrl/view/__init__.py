"""A local web viewer of what runs recorded: `python -m agentrl.view runs/x`."""
