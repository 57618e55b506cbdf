"""OpenAI's Responses API: texts, images as a tool, and stored conversations."""
