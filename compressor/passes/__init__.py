"""One file per method. The directory listing is the registry: ``pass: gptq`` is passes/gptq.py."""
