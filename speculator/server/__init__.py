"""An HTTP server with OpenAI's API over the engine. Needs the packages of the extra `serve`."""
