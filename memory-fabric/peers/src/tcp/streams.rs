//! Connections between members for other messages than those about memory.

use std::sync::mpsc::RecvTimeoutError;
use std::time::Instant;

use fabric_coherence::Member;
use fabric_host::Seldom;
use ring::hmac;

use super::channel::Channel;
use super::config::TcpPeersConfig;
use super::handshake::Credentials;
use super::keeper::{Keeper, News};
use crate::PeerError;

/// One connection to each other member, while they are made.
#[derive(Debug)]
pub struct Streams {
    keeper: Keeper,
    /// By member; this node has none.
    made: Vec<(Member, Option<Channel>)>,
    deadline: Instant,
    /// Why the last attempt failed.
    reason: Option<String>,
    /// Any host that reaches the port can cause refusals.
    notices: Seldom,
}

impl Streams {
    /// Starts to make the connections. Members prove that they know the VM's secret as those of
    /// [`TcpPeers`](super::TcpPeers) do. A connection with another `purpose` is refused.
    ///
    /// # Errors
    /// When the host refuses a thread or a descriptor.
    ///
    /// # Panics
    /// When there is not one address for each member of the table, or this node is none of them.
    pub fn begin(config: TcpPeersConfig, purpose: &str) -> Result<Self, PeerError> {
        config.check();
        let key = hmac::Key::new(hmac::HMAC_SHA256, &config.secret.0);
        // Never sent: what is sent is made of hellos, and with the key that this makes.
        let derived = hmac::sign(&key, purpose.as_bytes());
        let key = hmac::Key::new(hmac::HMAC_SHA256, derived.as_ref());
        let others = config.members.all().iter().filter(|one| *one != config.me);
        let made = others.map(|one| (one, None)).collect();
        let deadline = Instant::now() + config.start_timeout;
        let credentials = Credentials::new(&config, key);
        let keeper = Keeper::start(credentials, &config.addresses, config.listener);
        Ok(Self {
            keeper: keeper.map_err(PeerError::System)?,
            made,
            deadline,
            reason: None,
            notices: Seldom::notices(),
        })
    }

    /// Waits until all connections are made, and returns them. They do not block.
    ///
    /// # Errors
    /// When a member refuses this node, or is refused, or not all are connected in time.
    pub fn finish(mut self) -> Result<Vec<(Member, Channel)>, PeerError> {
        while let Some((missing, _)) = self.made.iter().find(|(_, stream)| stream.is_none()) {
            let missing = *missing;
            let left = self.deadline.saturating_duration_since(Instant::now());
            match self.keeper.news.recv_timeout(left) {
                Ok(News::Connected(peer, stream)) => {
                    // A later one replaces one whose other end gave up.
                    if let Some((_, place)) = self.made.iter_mut().find(|(one, _)| *one == peer) {
                        *place = stream.into_socket();
                    }
                }
                Ok(News::Failed(peer, error)) if error.is_final() => {
                    let reason = error.to_string();
                    return Err(PeerError::Refused { peer, reason });
                }
                Ok(News::Failed(_, error)) => self.reason = Some(error.to_string()),
                Ok(News::Refused(address, error)) => {
                    let text = format!("a connection of {address} was not accepted: {error}");
                    if let Some(unreported) = self.notices.pass(Instant::now()) {
                        tracing::warn!(unreported, "{text}");
                    }
                    self.reason = Some(text);
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    let late = "it did not connect in time".to_owned();
                    let reason = self.reason.map(|reason| format!("{late}; {reason}"));
                    return Err(PeerError::Lost {
                        peer: missing,
                        reason: reason.unwrap_or(late),
                    });
                }
            }
        }
        let made = self.made.into_iter();
        Ok(made
            .filter_map(|(peer, stream)| Some((peer, stream?)))
            .collect())
    }
}
