# agentrl with torch for the CPU. From the root of a checkout:
#   docker build -f examples/clusters/cpu.Dockerfile -t agentrl:cpu .
FROM python:3.11-slim-bookworm
WORKDIR /opt/agentrl
COPY . .
RUN pip install --no-cache-dir --no-deps --constraint constraints/cpu.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu torch \
    && pip install --no-cache-dir --constraint constraints/cpu.txt '.[gguf,hub,mcp,ray,retriever]'
RUN useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["agentrl"]
CMD ["--help"]
