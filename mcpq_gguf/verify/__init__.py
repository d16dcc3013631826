"""Proof: checks of written files with other code than wrote them, and with llama.cpp itself."""
