"""The dashboard and the metrics."""

from pydantic import BaseModel, Field


class MonitoringSettings(BaseModel):
    dashboard: bool = Field(
        True, description="Show the cache as it works: a page, and what that is made of."
    )
    dashboard_text: bool = Field(
        False, description="Show what is cached as text, too: other people's prompts and answers."
    )
    vllm_metric_names: bool = Field(
        True, description="Also name metrics as vLLM does, for dashboards made for it."
    )
