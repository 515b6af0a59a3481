//! What is asked of etcd: leases, keys and changes, as its JSON gateway has them (etcd,
//! `Documentation/dev-guide/api_grpc_gateway.md`): bytes in base64, 64-bit numbers as texts.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::client::{Client, Lines, RANGE};
use crate::error::EtcdError;

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    pub lease: i64,
    pub changed_at: i64,
}

/// A part of a list.
#[derive(Debug)]
pub(crate) struct Page {
    pub entries: Vec<Entry>,
    pub has_more: bool,
    /// Of the whole store.
    pub revision: i64,
}

/// A change of a key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Put(Entry),
    Deleted(Vec<u8>),
}

/// What a key must be for a write.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Condition {
    Absent,
    /// It was written under this lease.
    OfLease(i64),
    /// It was changed last at this revision.
    ChangedAt(i64),
}

fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Returns the end of the range of keys that begin with a prefix, which does not end with 0xff.
fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    if let Some(last) = end.last_mut() {
        *last = last.saturating_add(1);
    }
    end
}

/// A 64-bit number, which is absent if it is 0.
fn number(value: &Value) -> Option<i64> {
    match value {
        Value::Null => Some(0),
        Value::String(text) => text.parse().ok(),
        other => other.as_i64(),
    }
}

fn bytes(value: &Value) -> Option<Vec<u8>> {
    match value {
        Value::Null => Some(Vec::new()),
        other => STANDARD.decode(other.as_str()?).ok(),
    }
}

fn list(value: &Value) -> Option<&[Value]> {
    match value {
        Value::Null => Some(&[]),
        other => other.as_array().map(Vec::as_slice),
    }
}

fn entry(value: &Value) -> Option<Entry> {
    Some(Entry {
        key: bytes(&value["key"])?,
        value: bytes(&value["value"])?,
        lease: number(&value["lease"])?,
        changed_at: number(&value["mod_revision"])?,
    })
}

fn page(answer: &Value) -> Option<Page> {
    let entries = list(&answer["kvs"])?.iter().map(entry);
    Some(Page {
        entries: entries.collect::<Option<_>>()?,
        has_more: answer["more"].as_bool().unwrap_or(false),
        revision: number(&answer["header"]["revision"])?,
    })
}

impl Client {
    /// Obtains a lease, and returns its number.
    pub(crate) async fn grant(&mut self, seconds: u32) -> Result<i64, EtcdError> {
        let body = json!({ "TTL": seconds.to_string() });
        let answer = self.post("/v3/lease/grant", &body).await?;
        let id = number(&answer["ID"]).filter(|&id| id != 0);
        id.ok_or_else(|| self.malformed("a lease without a number"))
    }

    /// Renews a lease; returns whether it is still there.
    pub(crate) async fn keep_alive(&mut self, lease: i64) -> Result<bool, EtcdError> {
        let body = json!({ "ID": lease.to_string() });
        let answer = self.post("/v3/lease/keepalive", &body).await?;
        let seconds = number(&answer["result"]["TTL"]);
        let seconds = seconds.ok_or_else(|| self.malformed("a lease without a time"))?;
        Ok(seconds > 0)
    }

    /// Ends a lease, and removes its keys.
    pub(crate) async fn revoke(&mut self, lease: i64) -> Result<(), EtcdError> {
        let body = json!({ "ID": lease.to_string() });
        self.post("/v3/lease/revoke", &body).await.map(drop)
    }

    /// Writes a key under a lease if a condition holds. Returns the entry that is there if it does
    /// not; `Some(None)` if there is none.
    pub(crate) async fn put_if(
        &mut self,
        condition: Condition,
        key: &str,
        value: &[u8],
        lease: i64,
    ) -> Result<Option<Option<Entry>>, EtcdError> {
        let key = base64(key.as_bytes());
        let (target, field, expected) = match condition {
            Condition::Absent => ("CREATE", "create_revision", 0),
            Condition::OfLease(lease) => ("LEASE", "lease", lease),
            Condition::ChangedAt(revision) => ("MOD", "mod_revision", revision),
        };
        let mut compared = json!({ "key": key, "target": target, "result": "EQUAL" });
        compared[field] = expected.to_string().into();
        let put = json!({ "key": key, "value": base64(value), "lease": lease.to_string() });
        let body = json!({
            "compare": [compared],
            "success": [{ "request_put": put }],
            "failure": [{ "request_range": { "key": key } }],
        });
        let answer = self.post("/v3/kv/txn", &body).await?;
        if answer["succeeded"].as_bool() == Some(true) {
            return Ok(None);
        }
        let found = &answer["responses"][0]["response_range"];
        let mut found = page(found).ok_or_else(|| self.malformed("a key without a value"))?;
        Ok(Some(found.entries.pop()))
    }

    /// Lists keys with a prefix, from `start` on, as of a revision; 0 is the present one.
    pub(crate) async fn range(
        &mut self,
        prefix: &str,
        start: &[u8],
        limit: usize,
        revision: i64,
    ) -> Result<Page, EtcdError> {
        let body = json!({
            "key": base64(start),
            "range_end": base64(&end_of(prefix.as_bytes())),
            "limit": limit.to_string(),
            "revision": revision.to_string(),
        });
        let answer = self.post(RANGE, &body).await?;
        let page = page(&answer).filter(|page| page.entries.len() <= limit);
        page.ok_or_else(|| self.malformed("a list of keys"))
    }

    /// Asks for the changes of keys with a prefix since a revision.
    pub(crate) async fn watch(&self, prefix: &str, revision: i64) -> Result<Lines, EtcdError> {
        let request = json!({
            "key": base64(prefix.as_bytes()),
            "range_end": base64(&end_of(prefix.as_bytes())),
            "start_revision": revision.to_string(),
        });
        let body = json!({ "create_request": request });
        self.stream("/v3/watch", &body).await
    }
}

impl Lines {
    /// Returns the next changes, each with its revision; `None` when the watch cannot continue, and the
    /// keys have to be listed again.
    pub(crate) async fn changes(&mut self) -> Result<Option<Vec<(Change, i64)>>, EtcdError> {
        let line = self.next().await?;
        let result = &line["result"];
        if !result.is_object() || result["canceled"].as_bool() == Some(true) {
            return Ok(None);
        }
        let events = list(&result["events"]).unwrap_or_default();
        let changes = events.iter().map(|event| {
            let entry = entry(&event["kv"])?;
            let revision = entry.changed_at;
            let change = match event["type"].as_str() {
                Some("DELETE") => Change::Deleted(entry.key),
                _ => Change::Put(entry),
            };
            Some((change, revision))
        });
        let changes: Option<Vec<_>> = changes.collect();
        changes
            .map(Some)
            .ok_or_else(|| self.malformed("a change of a key"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_bytes_are_read_as_the_gateway_writes_them() {
        assert_eq!(number(&json!("7587869334234")), Some(7_587_869_334_234));
        assert_eq!(number(&Value::Null), Some(0));
        assert_eq!(number(&json!("x")), None);
        assert_eq!(bytes(&json!("YQ==")), Some(b"a".to_vec()));
        assert_eq!(bytes(&json!("?")), None);
        assert_eq!(bytes(&json!(1)), None);
        assert_eq!(end_of(b"/a/"), b"/a0");
    }
}
