"""Image generation, editing and storage over HTTP."""
