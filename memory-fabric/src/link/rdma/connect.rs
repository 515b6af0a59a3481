//! Setting up one RDMA connection to a lease.

use super::{RdmaLinkConfig, RdmaLinkError, registering_time};
use crate::control::{ControlError, ControlStream};
use crate::page::PageBytes;
use crate::transport::IN_FLIGHT_MAX;
use crate::transport::rdma::{
    ConnectAnswer, ConnectRequest, Device, Lane, LaneConfig, RdmaError, Settings,
};
use crate::wire::{FrameKind, RUN_PAGES_MAX, TrafficClass};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

/// Pages of a buffer for prefetching, 2 MiB: twice what the prefetcher has on its way.
const STAGING_PAGES: usize = 8 * RUN_PAGES_MAX as usize;

/// Connects to the lease by RDMA.
pub(in crate::link) fn connect(
    config: &RdmaLinkConfig,
    class: TrafficClass,
) -> Result<(Lane, Arc<Device>, TcpStream), RdmaLinkError> {
    let address = config.address;
    let here = |source| RdmaLinkError::Here { address, source };
    let donor = |source| RdmaLinkError::Donor { address, source };
    let mut control = ControlStream::connect_by(address, &config.carrier).map_err(donor)?;
    let local = control.local().map_err(donor)?;
    let (device, route) = Device::for_peer(&config.settings, local.ip()).map_err(here)?;
    let lane = Lane::prepare(&LaneConfig {
        device: Arc::clone(&device),
        route,
        pages: staging_pages(class, &config.settings),
        writes: class == TrafficClass::Bulk,
        depth: config.settings.depth.map_or(IN_FLIGHT_MAX, usize::from),
        retries: config.settings.retries,
        waiting: config.settings.waiting,
        peer: address.to_string(),
    });
    let lane = lane.map_err(here)?;
    let request = ConnectRequest {
        attach: config.ends.attach(config.token, class),
        endpoint: lane.endpoint(),
    };
    control.send(FrameKind::Connect, &request).map_err(donor)?;
    let (frame, payload) = control
        .receive(registering_time(config.bytes))
        .map_err(donor)?;
    let (node, epoch) = (config.ends.donor, request.attach.epoch);
    let signed = control.check_answer(&frame, FrameKind::Connected, node, epoch);
    signed.map_err(donor)?;
    let answer: ConnectAnswer = control.decode(frame.kind, &payload).map_err(donor)?;
    answer.memory.check(config.bytes).map_err(here)?;
    let port = answer
        .endpoint
        .check_port(address.ip(), &config.settings.peers);
    port.map_err(here)?;
    // Queue pair numbers and keys travelled under TLS where there is TLS; nothing more is sent.
    let session = control.into_socket().map_err(donor)?;
    let watched = session.set_nonblocking(true).and(session.try_clone());
    let watched = watched.map_err(|error| donor(ControlError::Stream(address, error)))?;
    let lane = lane.connect(&answer, session).map_err(here)?;
    Ok((lane, device, watched))
}

/// Pages that may be on their way at once. Runs of pages need neighbouring room.
fn staging_pages(class: TrafficClass, settings: &Settings) -> usize {
    match class {
        TrafficClass::Urgent | TrafficClass::Bulk => IN_FLIGHT_MAX,
        TrafficClass::Probe => STAGING_PAGES,
        TrafficClass::Prefetch => settings.staging_pages.unwrap_or(STAGING_PAGES),
    }
}

/// Reads a lease page by page, without a pager: for measuring and for tests.
#[derive(Debug)]
pub struct Reader(Lane);

impl Reader {
    /// Connects to a lease by RDMA; replaces another connection for faults.
    ///
    /// # Errors
    ///
    /// See [`RdmaLinkError`].
    pub fn connect(config: &RdmaLinkConfig) -> Result<Self, RdmaLinkError> {
        Self::connect_for(config, TrafficClass::Urgent)
    }

    /// Connects to a lease by RDMA; replaces another connection for `class`.
    ///
    /// # Errors
    ///
    /// See [`RdmaLinkError`].
    pub fn connect_for(
        config: &RdmaLinkConfig,
        class: TrafficClass,
    ) -> Result<Self, RdmaLinkError> {
        let (lane, ..) = connect(config, class)?;
        Ok(Self(lane))
    }

    /// Reads the page at `offset` (bytes) of the lease; gives the time from posting the request
    /// to its completion.
    ///
    /// # Errors
    ///
    /// When the request fails, or has not completed `within` that time. The reader is of no more
    /// use then.
    pub fn read(
        &mut self,
        offset: u64,
        within: Duration,
        page: &mut PageBytes,
    ) -> Result<Duration, RdmaError> {
        let mut take = |bytes: &[u8]| page.copy_from_slice(bytes);
        self.0.read_now(offset, within, &mut take)
    }
}
