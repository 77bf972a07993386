"""Everything that configs choose by name, and where the built-in choices are.

Users add their own as `module:object` or `path/to/file.py:object`, or by the decorator `register` of a registry.
Nothing is imported from here before it is chosen.
"""

from __future__ import annotations
