"""vLLM in the process of the tests, on one thread, so that they can look into it."""

import os

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", SHOAL_CONFIG="",
                  SHOAL_WEIGHTS="", TOKENIZERS_PARALLELISM="false", VLLM_LOGGING_LEVEL="WARNING")
