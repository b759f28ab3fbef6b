"""As `django-admin startproject` makes them, but for what a service without pages leaves out."""

from __future__ import annotations

from psycopg.conninfo import conninfo_to_dict

from tests.http.deployed import given

_AT = conninfo_to_dict(given().effects)

SECRET_KEY = "shop"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.http.django_shop.urls"
INSTALLED_APPS = ["tests.http.django_shop"]
MIDDLEWARE = ["django.middleware.security.SecurityMiddleware", "django.middleware.common.CommonMiddleware"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _AT["dbname"],
        "USER": _AT.get("user", ""),
        "PASSWORD": _AT.get("password", ""),
        "HOST": _AT.get("host", ""),
        "PORT": _AT.get("port", ""),
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
