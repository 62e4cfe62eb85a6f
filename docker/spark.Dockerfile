# Spark with Relatum on every node, built from this checkout:  docker build -f docker/spark.Dockerfile -t relatum-spark .
#
# apache/spark's own Python is older than Relatum takes; so here is the Python of the wheel, with PySpark and its Java.

FROM python:3.13-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY plugin plugin
COPY migrations migrations
COPY consumer_api consumer_api
COPY spark_connectors spark_connectors
COPY tools/wheel_hook.py tools/
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.13-slim
RUN apt-get update \
 && apt-get install --yes --no-install-recommends openjdk-21-jre-headless libpostgresql-jdbc-java procps \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheel /wheel
RUN pip install --no-cache-dir "$(echo /wheel/*.whl)[spark]" \
 && rm -r /wheel \
 && ln -s "$(python -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent)')" /opt/spark \
 && useradd --system --create-home relatum
USER relatum
WORKDIR /home/relatum
ENV SPARK_HOME=/opt/spark \
    PYSPARK_PYTHON=/usr/local/bin/python3 \
    PYTHONUNBUFFERED=1
ENTRYPOINT ["/opt/spark/bin/spark-class"]
