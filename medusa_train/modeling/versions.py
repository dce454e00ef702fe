"""What differs between the transformers versions that the package supports (5.17 and newer)."""

from __future__ import annotations

import inspect

from transformers import LlamaModel

# The forward argument that takes a key/value cache: `past_key_values` until transformers renamed it. A forward takes
# any keyword, so that the wrong name is no error: the model makes a cache of its own, and nobody reads it.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
