"""The back end for Azure Blob Storage. obstore finds and renews the credentials.

The chain looks in the environment for a token, an account key, a workload identity, a client secret or a shared access
signature (SAS), and then takes the machine's managed identity. The names of its variables are those of obstore.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import obstore
from obstore.store import AzureStore, HTTPStore

from tiering import PermanentStoreError
from tiers.object.bucket_options import ObjectOptions
from tiers.object.cloud import NO_RETRIES, client_options
from tiers.object.environment import EnvironmentCloud, EnvironmentSource, present_source
from tiers.object.faults import THROTTLED, Cause, Dialect

if TYPE_CHECKING:
    from obstore.store import AzureConfig

_KEYS = (
    "correct AZURE_STORAGE_ACCOUNT_KEY, the service principal or the SAS in the environment, or give this machine a "
    "managed identity"
)
_ROLE = "no permission; the identity needs the role Storage Blob Data Contributor on the container"
_NO_BUCKET = "no such container; create it, or correct url, account or endpoint_url"
_CODES: Mapping[str, tuple[Cause, str]] = {
    "AuthenticationFailed": (Cause.KEYS, f"the signature or token is wrong or has expired; {_KEYS}"),
    "InvalidAuthenticationInfo": (Cause.KEYS, f"the token is wrong or has expired; {_KEYS}"),
    "NoAuthenticationInformation": (Cause.KEYS, f"the request had no credentials; {_KEYS}"),
    "AuthorizationFailure": (
        Cause.KEYS,
        f"refused by wrong credentials or by the account's network rules; {_KEYS}",
    ),
    "AuthorizationPermissionMismatch": (Cause.PERMISSION, _ROLE),
    "AuthorizationSourceIPMismatch": (Cause.KEYS, "the SAS is for other addresses"),
    "AuthorizationProtocolMismatch": (Cause.KEYS, "the SAS is for https only"),
    "AuthorizationResourceTypeMismatch": (Cause.KEYS, "the SAS is not for blobs and containers"),
    "AuthorizationServiceMismatch": (Cause.KEYS, "the SAS is not for blobs"),
    "InsufficientAccountPermissions": (Cause.PERMISSION, _ROLE),
    "KeyBasedAuthenticationNotPermitted": (Cause.KEYS, "the account allows no account keys; use an identity"),
    "AccountIsDisabled": (Cause.BUCKET, "the storage account is disabled"),
    "ContainerNotFound": (Cause.BUCKET, _NO_BUCKET),
    "ContainerBeingDeleted": (Cause.BUCKET, "the container is being deleted"),
    "ContainerDisabled": (Cause.BUCKET, "the container is disabled"),
    "RequestBodyTooLarge": (Cause.SPACE, "the service takes no object of this size; lower block_size"),
    "BlobArchived": (Cause.REQUEST, "the blob is in the archive tier, and cannot be read"),
    "BlobImmutableDueToPolicy": (Cause.REQUEST, "an immutability policy keeps the blob"),
    "ServerBusy": (Cause.PASSING, THROTTLED),
    "OperationTimedOut": (Cause.PASSING, "the service did not finish in time"),
}
_SAS = EnvironmentSource("shared access signature", ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN"))
_SOURCES = (
    EnvironmentSource("token", ("AZURE_STORAGE_TOKEN",)),
    EnvironmentSource(
        "account key", ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY")
    ),
    EnvironmentSource("workload identity", ("AZURE_FEDERATED_TOKEN_FILE",), is_file=True),
    EnvironmentSource("client secret", ("AZURE_STORAGE_CLIENT_SECRET", "AZURE_CLIENT_SECRET")),
    _SAS,
)
"""The sources of credentials, in obstore's order."""

_SIGNED_FOR = datetime.timedelta(minutes=5)
_BATCH = 256
"""Maximum number of blobs in one request of a deletion."""
_LIFECYCLE = (
    "the rules of a storage account cannot be read with the credentials of its data, so ttl is not checked; add a "
    "rule that deletes {blocks}* {days} days after their modification: az storage account management-policy create"
)


class AzureCloud(EnvironmentCloud):
    """Azure Blob Storage.

    A deletion with a condition goes over a client of its own: obstore deletes by batches, which have no condition for
    each blob. That client's address has a signature (SAS), which obstore makes from the account key or the identity.
    """

    dialect = Dialect(_CODES, keys=_KEYS, bucket=_NO_BUCKET, present=("BlobAlreadyExists",))
    permissions: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("list", "head", "get"), "Microsoft.Storage/.../blobs/read on the container"),
        **dict.fromkeys(("put", "conditional put"), "Microsoft.Storage/.../blobs/write on the container"),
        "delete": "Microsoft.Storage/.../blobs/delete on the container",
        "delete one version": (
            "Microsoft.Storage/.../blobs/delete on the container, and to an identity also "
            "Microsoft.Storage/.../generateUserDelegationKey on the account"
        ),
    }
    sources, keys, lifecycle = _SOURCES, _KEYS, _LIFECYCLE
    machine = "the managed identity of this machine"
    options: ObjectOptions
    bulk = _BATCH
    per_request = _BATCH

    def connect(self, headers: Mapping[str, str] | None = None) -> AzureStore:
        bucket, words = self.options.bucket, client_options(self.options, headers)
        config: AzureConfig = {}
        if self.options.account_name is not None:
            config["account_name"] = self.options.account_name
        if self.options.endpoint is not None:
            config["endpoint"] = self.options.endpoint
        return self.make(lambda: AzureStore(bucket, config=config, client_options=words, retry_config=NO_RETRIES))

    def deleter(self, name: str, version: str) -> HTTPStore:
        endpoint = self.options.endpoint or f"https://{self.options.account_name}.blob.core.windows.net"
        address = f"{endpoint}/{self.options.bucket}?{self._signature(name)}"
        return HTTPStore.from_url(
            address,
            client_options=client_options(self.options, {self.condition: version}),
            retry_config=NO_RETRIES,
        )

    def _signature(self, name: str) -> str:
        """Return the query of an address with which ``name`` may be deleted."""
        found = present_source(_SOURCES)
        if found is not None and found[0] is _SAS:
            return os.environ[found[1]].removeprefix("?")
        signed = obstore.sign(self.connect(), "DELETE", name, _SIGNED_FOR)
        query = signed.partition("?")[2]
        if not query:
            raise PermanentStoreError("the client does not sign addresses, so no single version can be deleted")
        return query
