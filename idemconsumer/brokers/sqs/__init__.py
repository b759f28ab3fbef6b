"""SQS and servers that speak its protocol, through aiobotocore. The only room that imports that driver."""
