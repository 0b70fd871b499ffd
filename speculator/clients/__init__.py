"""Clients of other people's servers: vLLM, SGLang, llama.cpp, or any with OpenAI's API. `speculator.server` is our own.

All code that knows such a server, from the imported to the importing:

    speculator/clients/connection.py       addresses, API keys, and errors in one line
    speculator/clients/counters.py         verification steps on a server's page /metrics
    speculator/clients/vllm_updates.py     replaces the draft head of a running vLLM server
    speculator/clients/hidden_states.py    hidden states from vLLM servers, for training
    speculator/target/remote/              the target of such a training: `ServerTarget`
    speculator/checkpoints/                each layout names the servers that load it, and their commands;
                                           targets.yaml, targets.py and limits.py say which targets and
                                           heads a server takes; vllm_plugin.py is for vLLM alone
    data/writers/server.py                  text from servers: `data generate --server`
    eval/as_server.py                      decodes here as a server would: `eval --as`
    eval/in_server.py                      measures a head in its server: `eval --server`
    train/server_command.py                starts and checks servers for training: `speculator server-command`
    train/finish.py                        how to serve and measure a head that was trained with servers
    integrations/vllm/                     the plugin that vLLM loads
"""
