"""OpenAI's interface over the engine. Needs the packages of the extra `serve`."""
