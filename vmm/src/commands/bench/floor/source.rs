//! A donor as a bare client sees it: one connection, and answers in the order of the requests.

use std::io::{ErrorKind, IoSlice};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use fabric_transport::control::ControlStream;
use fabric_transport::stream::{Carrier, Stream};
use fabric_wire::{
    Ends, Frame, FrameKind, HEADER_BYTES, LeaseGrant, LeaseRequest, LeaseStatus, TrafficClass,
};
use memory_fabric::NodeId;
use memory_fabric::page::{PAGE_SIZE, PageBytes};

use crate::commands::bench::view::page_bytes;

/// Longest wait for a page.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
/// Writes that are on their way at once while the donor gets its pages.
const WRITES: usize = 16;

/// A connection to a donor that has some pages, each with the contents of its number.
#[derive(Debug)]
pub(in crate::commands::bench) struct Source {
    control: ControlStream,
    grant: LeaseGrant,
    pub(super) stream: Stream,
    checksum: bool,
    answer: Box<[u8; HEADER_BYTES + PAGE_SIZE]>,
    filled: usize,
}

impl Source {
    /// Leases this many pages and fills them.
    pub(in crate::commands::bench) fn connect(
        donor: SocketAddr,
        carrier: &Carrier,
        checksum: bool,
        pages: usize,
    ) -> Result<Self> {
        let bytes = (pages * PAGE_SIZE) as u64;
        let (control, grant, stream) = attach(donor, carrier, bytes, TrafficClass::Urgent)?;
        let mut source = Self {
            control,
            grant,
            stream,
            checksum,
            answer: Box::new([0; HEADER_BYTES + PAGE_SIZE]),
            filled: 0,
        };
        source.fill(pages).context("a donor of the floor")?;
        source.stream.set_nonblocking()?;
        Ok(source)
    }

    fn fill(&mut self, pages: usize) -> Result<()> {
        let mut frames = Vec::with_capacity(WRITES * (HEADER_BYTES + PAGE_SIZE));
        let mut answers = [0; WRITES * HEADER_BYTES];
        for first in (0..pages).step_by(WRITES) {
            let count = WRITES.min(pages - first);
            frames.clear();
            for page in first..first + count {
                let bytes = page_bytes(page);
                frames.extend(self.frame(FrameKind::WritePage, page).encode(&bytes));
                frames.extend(bytes);
            }
            let deadline = Instant::now() + TIMEOUT;
            self.stream.write_all_by(&frames, deadline)?;
            let mut rest = &mut answers[..count * HEADER_BYTES];
            while !rest.is_empty() {
                let read = self.stream.read_by(rest, deadline)?;
                ensure!(read > 0, "the donor closed the connection");
                rest = &mut rest[read..];
            }
        }
        Ok(())
    }

    fn frame(&self, kind: FrameKind, page: usize) -> Frame {
        Frame::new(kind, 1, (page * PAGE_SIZE) as u64, self.checksum).with_stamp(ends().stamp())
    }

    /// Sends a request, for which there is room unless the donor reads nothing.
    pub(in crate::commands::bench) fn request(&mut self, page: usize) -> Result<()> {
        let frame = self.frame(FrameKind::ReadPage, page).encode(&[]);
        let written = self.stream.write_vectored(&[IoSlice::new(&frame)])?;
        ensure!(
            written == HEADER_BYTES,
            "a request of {HEADER_BYTES} bytes finds no room"
        );
        Ok(())
    }

    /// Returns whether a page has come.
    pub(in crate::commands::bench) fn receive(&mut self, page: &mut PageBytes) -> Result<bool> {
        match self.stream.read(&mut self.answer[self.filled..]) {
            Ok(0) => bail!("the donor closed the connection"),
            Ok(count) => self.filled += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        let is_here = self.filled == self.answer.len();
        if is_here {
            page.copy_from_slice(&self.answer[HEADER_BYTES..]);
            self.filled = 0;
        }
        Ok(is_here)
    }

    /// Prolongs the lease.
    pub(super) fn renew(&mut self) -> Result<()> {
        self.tell(FrameKind::Renew)
    }

    /// Ends the lease.
    pub(in crate::commands::bench) fn release(mut self) -> Result<()> {
        self.tell(FrameKind::Release)
    }

    fn tell(&mut self, kind: FrameKind) -> Result<()> {
        let token = self.grant.token;
        let _: LeaseStatus = self.control.call(kind, &token, FrameKind::Status)?;
        Ok(())
    }
}

/// This host and the donor.
pub(in crate::commands::bench) fn ends() -> Ends {
    Ends {
        local: NodeId(0).into(),
        donor: NodeId(1),
    }
}

/// Obtains a separate lease of `bytes`, and a connection for its pages.
pub(in crate::commands::bench) fn attach(
    donor: SocketAddr,
    carrier: &Carrier,
    bytes: u64,
    class: TrafficClass,
) -> Result<(ControlStream, LeaseGrant, Stream)> {
    let mut control = ControlStream::connect_by(donor, carrier)?;
    let request = LeaseRequest {
        vm: "floor".to_owned(),
        bytes,
        or_less: false,
        duration_ms: 120_000,
    };
    let grant: LeaseGrant = control.call(FrameKind::Lease, &request, FrameKind::Granted)?;
    let mut attached = ControlStream::connect_by(donor, carrier)?;
    attached.attach(grant.token, class, &ends())?;
    Ok((control, grant, attached.into_stream()))
}
