# The command line, on CPUs:
#   docker build -t offbeat .
#   docker run --rm offbeat plan --parameters 25M --step-time 120ms --workers 16 --bandwidth 5gbit
FROM python:3.11-slim

COPY pyproject.toml constraints.txt README.md LICENSE /source/
COPY src /source/src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
      -c /source/constraints.txt '/source[all]' \
    && rm -r /source \
    && useradd --create-home offbeat

USER offbeat
WORKDIR /home/offbeat
ENTRYPOINT ["offbeat"]
