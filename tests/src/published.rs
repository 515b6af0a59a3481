//! Validates the product's JSON against the published schemas.

use anyhow::{Context as _, ensure};
use serde_json::Value;

/// A schema in `docs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// Output of `--report` of a VM.
    Report,
    /// Output of `--report` of a node.
    NodeReport,
    /// Output of `status --json`.
    Status,
}

impl Published {
    fn schema(self) -> &'static str {
        match self {
            Self::Report => include_str!("../../docs/report.schema.json"),
            Self::NodeReport => include_str!("../../docs/node-report.schema.json"),
            Self::Status => include_str!("../../docs/status.schema.json"),
        }
    }

    /// Parses and validates the product's output.
    ///
    /// # Errors
    ///
    /// Fails when it is not JSON, or violates the schema; lists each place with its violation.
    pub fn parse(self, text: &str) -> anyhow::Result<Value> {
        let value = serde_json::from_str(text).with_context(|| format!("{self:?}: {text:?}"))?;
        let schema = serde_json::from_str(self.schema())?;
        let validator = jsonschema::validator_for(&schema).context("the schema")?;
        let wrong: Vec<String> = validator
            .iter_errors(&value)
            .map(|error| format!("{}: {error}", error.instance_path()))
            .collect();
        ensure!(
            wrong.is_empty(),
            "{self:?} is not as its schema says: {wrong:#?}"
        );
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_as_published_is_told_with_its_place() {
        for published in [Published::Report, Published::NodeReport, Published::Status] {
            assert!(published.parse("{").is_err());
            let error = published
                .parse(r#"{"schema": "one"}"#)
                .expect_err("a wrong one");
            assert!(error.to_string().contains("/schema: "), "{error}");
        }
        let nothing = r#"{"schema": 1, "vms": [], "nodes": []}"#;
        Published::Status.parse(nothing).expect("nothing runs");
    }
}
