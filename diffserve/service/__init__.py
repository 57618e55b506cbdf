"""HTTP service with OpenAI's image API, in a process that never imports torch."""
