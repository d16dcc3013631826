"""`python -m mcpq_gguf`."""

from .cli import main

main()
