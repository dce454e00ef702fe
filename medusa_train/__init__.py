"""medusa-train: trains Medusa heads on a chat LLM and measures what they win.

Importing this package imports neither torch nor transformers, so that `--help` answers at once.
"""

__version__ = "0.1.0"
