//! Setting up one RDMA connection to a lease.

use super::{RdmaLinkConfig, RdmaLinkError, registering_time};
use crate::control::{CONTROL_TIMEOUT, ControlError, ControlStream};
use crate::page::PageBytes;
use crate::transport::IN_FLIGHT_MAX;
use crate::transport::rdma::{
    ConnectAnswer, ConnectRequest, Device, Lane, LaneConfig, RdmaError, Settings,
};
use crate::wire::{FrameKind, RUN_PAGES_MAX, TrafficClass};
use fabric_host::poll::poll_until;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages of a buffer for prefetching, 2 MiB: twice what the prefetcher has on its way.
const STAGING_PAGES: usize = 8 * RUN_PAGES_MAX as usize;

/// How often a caller is called back while the donor registers memory.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// Connects to the lease by RDMA. Calls `meanwhile` while the donor registers the lease's memory, which
/// may take an hour or hang; it returns whether to go on waiting.
pub(in crate::link) fn connect(
    config: &RdmaLinkConfig,
    class: TrafficClass,
    meanwhile: &mut dyn FnMut() -> bool,
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
    let until = Instant::now() + registering_time(config.bytes);
    // A removal of the device waits until the lane is dropped.
    let mut meanwhile = || !device.is_gone() && meanwhile();
    await_answer(&control, until, &mut meanwhile)
        .map_err(|error| donor(ControlError::Stream(address, error)))?;
    // It has begun to answer, or there is no time left.
    let left = until.saturating_duration_since(Instant::now());
    let received = control.receive(left.min(CONTROL_TIMEOUT));
    let (frame, payload) = received.map_err(donor)?;
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

/// Waits until there is something to read, or until `until`.
fn await_answer(
    control: &ControlStream,
    until: Instant,
    meanwhile: &mut dyn FnMut() -> bool,
) -> io::Result<()> {
    let Some(socket) = control.socket() else {
        return Ok(());
    };
    loop {
        let mut fds = [libc::pollfd {
            fd: socket.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        poll_until(&mut fds, Some(until.min(Instant::now() + LOOK_INTERVAL)))?;
        if fds[0].revents != 0 || Instant::now() >= until {
            return Ok(());
        }
        if !meanwhile() {
            return Err(io::Error::other(
                "it is not wanted any more, or this host's device is removed",
            ));
        }
    }
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
        let (lane, ..) = connect(config, class, &mut || true)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::Carrier;
    use std::io::Write as _;
    use std::net::TcpListener;

    /// An end of a connection, and a donor's that says nothing yet.
    fn connection() -> (ControlStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        let control = ControlStream::connect_by(address, &Carrier::Tcp).expect("a connection");
        (control, listener.accept().expect("a connection").0)
    }

    #[test]
    fn a_wait_for_a_donor_that_hangs_ends_when_it_is_not_wanted_any_more() {
        let (control, _donor) = connection();
        let mut looks = 0;
        let until = Instant::now() + Duration::from_secs(3600);
        let ended = await_answer(&control, until, &mut || {
            looks += 1;
            looks < 3
        });
        assert!(ended.is_err());
        assert_eq!(looks, 3);
    }

    #[test]
    fn a_wait_ends_with_the_answer_the_end_of_the_donor_and_the_limit() {
        let until = Instant::now() + Duration::from_secs(3600);
        // The donor answers after the first look, or is gone.
        for ends in [false, true] {
            let (control, mut donor) = connection();
            let mut said = false;
            await_answer(&control, until, &mut || {
                assert!(!said, "it was noticed");
                said = true;
                if ends {
                    donor.shutdown(std::net::Shutdown::Both).expect("shut down");
                } else {
                    donor.write_all(&[1]).expect("sent");
                }
                true
            })
            .expect("no error");
        }
        let (control, _donor) = connection();
        await_answer(&control, Instant::now(), &mut || panic!("too late")).expect("no error");
    }
}
