"""The front door: HTTP in the words of OpenAI's image API, in a process that never imports torch."""
