# docker build -t optimum-neuronal .
# docker run --rm -v "$PWD:/work" optimum-neuronal prune --model DENSE --sparsity 0.7 --dataset text.txt --output SPARSE
FROM python:3.13-slim

# The compiler makes the kernels for packed weights and goes again; their threads, libgomp, stay.
COPY . /source
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
    && pip install --no-cache-dir -c /source/constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch \
    && pip install --no-cache-dir -c /source/constraints.txt "/source[train,report]" \
    && apt-get purge -y --auto-remove gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* /source

WORKDIR /work
ENTRYPOINT ["optimum-cli", "neuronal"]
CMD ["--help"]
