"""Images in the bodies of requests, as OpenAI's clients and others name them."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from engine.values.images import Detail
from server.generation.conversation import ImageData, ImagePart, ImageSource, ImageUrl
from server.json_model import RequestModel

ImageDetail = Literal["auto", "low", "high", "original"]


def image_source(url: str) -> ImageSource:
    """The source of an image that a client names by a URL, which may be one with its data."""
    is_elsewhere = url[:8].lower().startswith(("http://", "https://"))
    return ImageUrl(url) if is_elsewhere else ImageData(url)


def image_detail(detail: ImageDetail) -> Detail:
    """How large an image is shown, as OpenAI's clients have it."""
    return Detail.LOW if detail == "low" else Detail.FULL


class ImageUrlParam(RequestModel):
    url: str = Field(
        description="A data: URL; one of http or https where the settings allow its host."
    )
    detail: ImageDetail = Field(
        "auto", description="`low` shows the image with the fewest tokens that the model allows."
    )


def _as_image_url(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


class ImageUrlPart(RequestModel):
    """An image."""

    type: Literal["image_url"]
    image_url: Annotated[
        ImageUrlParam, BeforeValidator(_as_image_url, json_schema_input_type=str | ImageUrlParam)
    ]

    def value(self) -> ImagePart:
        return ImagePart(image_source(self.image_url.url), image_detail(self.image_url.detail))
