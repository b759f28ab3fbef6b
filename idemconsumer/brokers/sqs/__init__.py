"""SQS and what speaks its protocol, through aiobotocore. The only room that imports that driver."""
