# agentrl with SGLang, whose requirements bring torch with CUDA. From the root of a checkout:
#   docker build -f examples/clusters/cuda.Dockerfile -t agentrl:cuda .
# The image has CUDA's compiler, because SGLang compiles kernels when it starts.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/python
ENV PATH=/opt/python/bin:$PATH
WORKDIR /opt/agentrl
COPY . .
# SGLang's own requirements choose torch. Ubuntu's image brings a user of number 1000.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[gguf,hub,mcp,ray,retriever,sglang]'
USER 1000
WORKDIR /home/ubuntu
ENTRYPOINT ["agentrl"]
CMD ["--help"]
