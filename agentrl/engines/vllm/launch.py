"""Main of a vLLM server process: `python -m agentrl.engines.vllm.launch ARGUMENTS`, ARGUMENTS as `vllm serve` has them.

Started by `VLLMProcess`, it ends with its starter (`agentrl.engines.servers.starter`), and answers only to its key.
"""

from __future__ import annotations

import os
import threading

from agentrl.engines.servers.starter import STARTER, end_with

if __name__ == "__main__":  # vLLM's own processes import this module, too
    if STARTER in os.environ:
        threading.Thread(target=end_with, args=(int(os.environ.pop(STARTER)),), daemon=True).start()
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
