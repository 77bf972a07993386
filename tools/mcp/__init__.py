"""Tools of MCP servers: `class_name: tools.mcp.MCPTools`. See docs/http_tools.md."""

from agentrl.errors import install_extra

try:
    import mcp as _mcp  # noqa: F401 - the official SDK
except ModuleNotFoundError as error:
    raise ImportError(f"MCP tools need the official SDK: {install_extra('mcp')}") from error

from tools.mcp.tools import MCPConfig, MCPTools

__all__ = ["MCPConfig", "MCPTools"]
