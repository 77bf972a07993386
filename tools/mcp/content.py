"""Conversion of an MCP tool's answer to what a model is shown."""

from __future__ import annotations

import base64
import json

import mcp_types

from agentrl.tool import ToolFailed, ToolResponse


def response_of(result: mcp_types.CallToolResult) -> ToolResponse:
    """Convert texts, joined by line ends, and images; without any text, the structured content as JSON.

    Raises ToolFailed for an error.
    """
    images = [block for block in result.content if isinstance(block, mcp_types.ImageContent)]
    text = "\n".join(_text(block) for block in result.content if block not in images)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise ToolFailed(text or "the tool failed and did not say why")
    if not images:
        return ToolResponse(text or "(no content)")
    try:
        return ToolResponse(text, images=[base64.b64decode(image.data, validate=True) for image in images])
    except ValueError as error:
        raise ToolFailed(f"the tool's image is no base64: {error}") from error


def _text(block: mcp_types.ContentBlock) -> str:
    if isinstance(block, mcp_types.TextContent):
        return block.text
    if isinstance(block, mcp_types.ResourceLink):
        return f"{block.name}: {block.uri}"
    if isinstance(block, mcp_types.EmbeddedResource):
        if isinstance(block.resource, mcp_types.TextResourceContents):
            return block.resource.text
        return f"({block.resource.uri}: data that is no text is not shown)"
    return f"({block.type} of type {block.mime_type}: it is not shown)"
