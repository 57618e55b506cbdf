"""OpenAI's Responses over HTTP: texts, pictures painted as a tool, and conversations that go on."""
