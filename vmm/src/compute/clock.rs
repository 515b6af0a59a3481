//! What a node's clock is before a VM starts there.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use memory_fabric::compute::{Carrier, ControlError, ControlStream, FrameKind, NodeClock};

use crate::machine::{ClockSurvey, HostClock, OtherRate, Surveyed};

/// Exchanges of a comparison, and the time between two of them: long enough for a drift.
const EXCHANGES: u8 = 64;
const INTERVAL: Duration = Duration::from_millis(16);
/// A node that answers slowly is compared in fewer of them.
const TIME_MAX: Duration = Duration::from_secs(5);

/// What a node says of itself, and how its clock compares with this host's.
#[derive(Clone, Copy, Debug)]
pub struct NodeSurvey {
    /// Its first answer.
    pub node: NodeClock,
    /// The comparison; `None` if KVM of one of the hosts says nothing of its clock.
    pub compared: Option<Result<Surveyed, OtherRate>>,
}

/// Compares the clock of a node that lends vCPUs with this host's, which takes a second or more.
///
/// # Errors
///
/// When the node is absent, refuses or breaks the protocol.
pub fn survey(
    address: SocketAddr,
    carrier: &Carrier,
    here: Option<HostClock>,
) -> Result<NodeSurvey, ControlError> {
    let mut control = ControlStream::connect_by(address, carrier)?;
    let mut read = || -> Result<NodeClock, ControlError> {
        control.call(FrameKind::ReadClock, &(), FrameKind::Clock)
    };
    let node = read()?;
    let there = node.rate.filter(|rate| rate.khz > 0).map(|rate| HostClock {
        khz: rate.khz,
        scales: rate.scales,
    });
    let (Some(here), Some(there)) = (here, there) else {
        let compared = None;
        return Ok(NodeSurvey { node, compared });
    };
    let mut survey = match ClockSurvey::new(here, there) {
        Ok(survey) => survey,
        Err(other) => {
            let compared = Some(Err(other));
            return Ok(NodeSurvey { node, compared });
        }
    };
    let until = Instant::now() + TIME_MAX;
    for _ in 0..EXCHANGES {
        survey.exchange(|| read().map(|clock| clock.ticks))?;
        if Instant::now() > until {
            break;
        }
        thread::sleep(INTERVAL);
    }
    let compared = survey.found().map(Ok);
    Ok(NodeSurvey { node, compared })
}
