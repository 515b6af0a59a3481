//! All nodes that are registered.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_identity::Name;
use tokio::time::timeout;

use crate::client::Client;
use crate::error::{EtcdError, quoted};
use crate::member::Member;
use crate::target::Endpoints;

/// Most nodes that are read: more than any cluster of this program has had, and few enough to compare
/// all of them.
pub const NODES_MAX: usize = 1024;
/// Entries of one request: with values as large as etcd accepts, the answer is within its limit.
const PAGE_ENTRIES: usize = 16;

/// What is registered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The nodes by name.
    pub members: BTreeMap<Name, Member>,
    /// One line for each entry that was left out, with its key and its problem.
    pub problems: Vec<String>,
}

/// What is registered, at a revision of the store.
#[derive(Debug)]
pub struct Listed {
    /// The nodes.
    pub found: Found,
    pub(crate) revision: i64,
}

impl Found {
    /// Notes an entry. Returns the problem for which it was left out.
    pub(crate) fn note(&mut self, prefix: &str, key: &[u8], value: &[u8]) -> Option<String> {
        let name = key.strip_prefix(prefix.as_bytes()).unwrap_or_default();
        match Member::read(name, value) {
            Ok((name, _))
                if self.members.len() >= NODES_MAX && !self.members.contains_key(&name) =>
            {
                Some(format!(
                    "{}: {NODES_MAX} nodes are the limit",
                    key_text(key)
                ))
            }
            Ok((name, member)) => {
                self.members.insert(name, member);
                None
            }
            Err(error) => {
                // What was there before is not so any more.
                self.remove(prefix, key);
                Some(format!("{}: {error}", key_text(key)))
            }
        }
    }

    pub(crate) fn remove(&mut self, prefix: &str, key: &[u8]) {
        let name = key.strip_prefix(prefix.as_bytes()).unwrap_or_default();
        let name = std::str::from_utf8(name).ok();
        if let Some(name) = name.and_then(|name| name.parse::<Name>().ok()) {
            self.members.remove(&name);
        }
    }
}

fn key_text(key: &[u8]) -> String {
    quoted(&String::from_utf8_lossy(key))
}

/// Lists all nodes, as of one revision.
pub(crate) async fn list(client: &mut Client) -> Result<Listed, EtcdError> {
    let prefix = client.endpoints().target.nodes();
    let mut start = prefix.clone().into_bytes();
    let (mut found, mut revision, mut read) = (Found::default(), 0, 0);
    loop {
        let page = client
            .range(&prefix, &start, PAGE_ENTRIES, revision)
            .await?;
        if revision == 0 {
            revision = page.revision;
        }
        for entry in &page.entries {
            let problem = found.note(&prefix, &entry.key, &entry.value);
            found.problems.extend(problem);
        }
        read += page.entries.len();
        let last = page.entries.last().filter(|_| page.has_more);
        let Some(last) = last else {
            break;
        };
        if read >= NODES_MAX {
            found.problems.push(format!(
                "{prefix}: only the first {NODES_MAX} entries were read"
            ));
            break;
        }
        start.clone_from(&last.key);
        // The next key after it.
        start.push(0);
    }
    Ok(Listed { found, revision })
}

/// Asks for all nodes that are registered, and waits for the answer up to `limit`.
///
/// # Errors
///
/// Fails when etcd gives no answer.
pub fn find(endpoints: &Endpoints, limit: Duration) -> Result<Found, EtcdError> {
    let runtime = runtime()?;
    let listed = async {
        let mut client = Client::new(endpoints);
        timeout(limit, list(&mut client)).await
    };
    match runtime.block_on(listed) {
        Ok(listed) => listed.map(|listed| listed.found),
        Err(_) => Err(EtcdError::Late {
            endpoints: endpoints.to_string(),
            seconds: limit.as_secs(),
        }),
    }
}

/// Makes the runtime of a thread that asks etcd.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, EtcdError> {
    let made = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build();
    made.map_err(|error| EtcdError::System(error.to_string()))
}
