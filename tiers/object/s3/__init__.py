"""The back end for S3 and services with its protocol.

obstore moves objects, boto3 finds credentials and administers the bucket.
"""
