"""The Create tab: prompt, settings and the generated images."""
