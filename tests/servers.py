"""Object stores for tests, each a process on loopback, with raw access to their buckets.

Raw access goes through the clouds' own clients (boto3, azure-storage-blob), so that the tier, which moves bytes with
obstore, is never checked against itself.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from examples import s3_server
from scripts import azurite as azurite_script
from scripts import ceph_rgw as ceph_script

if TYPE_CHECKING:
    from azure.storage.blob import ContainerClient


class Bucket(Protocol):
    """Raw access to the objects of a bucket or container."""

    @property
    def name(self) -> str: ...

    def names(self, prefix: str = "") -> list[str]: ...

    def read(self, name: str) -> bytes | None: ...

    def write(self, name: str, data: bytes) -> None: ...

    def delete(self, name: str) -> None: ...

    def close(self) -> None: ...


class Endpoint(Protocol):
    """A running server."""

    def environment(self) -> dict[str, str]:
        """Return the environment in which the cloud's chain yields this server's credentials alone."""

    def make_bucket(self, name: str) -> Bucket:
        """Create a bucket and return raw access to it."""

    def words(self, bucket: str, prefix: str = "") -> dict[str, Any]:
        """Return the words of a tier on a bucket of this server."""


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """A running S3 server."""

    endpoint: str
    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        """Return the environment in which boto3's chain yields this server's credentials alone."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def words(self, bucket: str, prefix: str = "") -> dict[str, Any]:
        return {"type": "s3", "bucket": bucket, "prefix": prefix, "endpoint_url": self.endpoint}

    def client(self) -> Any:
        """Return a boto3 client."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}),
        )

    def make_bucket(self, name: str) -> RawBucket:
        """Create a bucket and return raw access to it."""
        client = self.client()
        client.create_bucket(Bucket=name)
        return RawBucket(client, name)


@dataclass(frozen=True, slots=True)
class RawBucket:
    """Raw access to a bucket through boto3."""

    client: Any
    name: str

    def names(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self.client.get_object(Bucket=self.name, Key=name)["Body"].read())
        except ClientError as error:
            if error.response["Error"]["Code"] in {"NoSuchKey", "404"}:
                return None
            raise

    def write(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=name, Body=data)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=name)

    def clear(self) -> None:
        for name in self.names():
            self.delete(name)

    def close(self) -> None:
        self.client.close()


@dataclass(frozen=True, slots=True)
class AzureEndpoint:
    """A running server of Azure Blob Storage."""

    endpoint: str
    account_key: str
    ca_file: Path | None = None
    """Authority of the server's certificate; None (default): plain HTTP."""

    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": azurite_script.ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": self.account_key,
        }

    def words(self, bucket: str, prefix: str = "") -> dict[str, Any]:
        chosen: dict[str, Any] = {"type": "object", "url": f"az://{bucket}/{prefix}", "endpoint_url": self.endpoint}
        return chosen if self.ca_file is None else chosen | {"ca_file": str(self.ca_file)}

    def make_bucket(self, name: str) -> RawContainer:
        from azure.storage.blob import ContainerClient  # The environment of vLLM's tests has no such package.

        client = ContainerClient(
            self.endpoint,
            name,
            credential={"account_name": azurite_script.ACCOUNT, "account_key": self.account_key},
            connection_verify=True if self.ca_file is None else str(self.ca_file),
        )
        client.create_container()
        return RawContainer(client, name)


@dataclass(frozen=True, slots=True)
class RawContainer:
    """Raw access to a container through azure-storage-blob."""

    client: ContainerClient
    name: str

    def names(self, prefix: str = "") -> list[str]:
        return list(self.client.list_blob_names(name_starts_with=prefix))

    def read(self, name: str) -> bytes | None:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            return self.client.download_blob(name).readall()
        except ResourceNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        self.client.upload_blob(name, data, overwrite=True)

    def delete(self, name: str) -> None:
        self.client.delete_blob(name)

    def close(self) -> None:
        self.client.close()


@contextlib.contextmanager
def moto_server() -> Iterator[S3Endpoint]:
    """A moto server, which keeps objects in memory and accepts any credentials."""
    with _process(s3_server.start_moto) as endpoint:
        yield endpoint


@contextlib.contextmanager
def rclone_server() -> Iterator[S3Endpoint]:
    """A server of ``rclone serve s3`` over files, which checks signatures."""
    with _process(s3_server.start_rclone) as endpoint:
        yield endpoint


@contextlib.contextmanager
def ceph_rgw() -> Iterator[S3Endpoint]:
    """Ceph's object gateway over a store in memory; skips the test where Ceph is not installed."""
    if not ceph_script.installed():
        pytest.skip(f"Ceph is not installed; apt-get install --no-install-recommends {' '.join(ceph_script.PACKAGES)}")
    with ceph_script.serving() as ceph:
        yield S3Endpoint(ceph.endpoint, ceph.access_key, ceph.secret_key)


@contextlib.contextmanager
def azurite(*arguments: str, ca_file: Path | None = None) -> Iterator[AzureEndpoint]:
    """Azurite in memory, which checks signatures; skips the test where it is not installed.

    Args:
        arguments: further arguments of the program.
        ca_file: authority of the certificate that ``arguments`` name; default: plain HTTP.
    """
    reason = azurite_script.why_not()
    if reason is not None:
        pytest.skip(reason)
    with azurite_script.serving(*arguments) as server:
        yield AzureEndpoint(server.endpoint, server.account_key, ca_file)


@contextlib.contextmanager
def _process(start: Callable[[Path], s3_server.S3Server]) -> Iterator[S3Endpoint]:
    with tempfile.TemporaryDirectory(prefix="s3-") as directory:
        server = start(Path(directory) / "objects")
        try:
            yield S3Endpoint(server.endpoint, server.access_key, server.secret_key)
        finally:
            s3_server.stop(server.process)
