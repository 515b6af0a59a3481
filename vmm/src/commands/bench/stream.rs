//! The raw stream: the maximum rate of pages from a donor over one TCP connection.

use std::io::{IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use fabric_transport::IN_FLIGHT_MAX;
use fabric_transport::control::ControlStream;
use fabric_transport::stream::{Carrier, Stream as Connection};
use fabric_wire::{Frame, FrameKind, HEADER_BYTES, LeaseGrant, LeaseStatus, TrafficClass};
use memory_fabric::page::{PAGE_SIZE, PageBytes};

use super::floor;
use super::view::{content, differing_bytes, page_bytes};

/// Longest silence before the donor is considered dead.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Size of the receive buffer: that of the transport.
const INPUT_BYTES: usize = 128 << 10;

/// A client that keeps as many reads outstanding as the transport does, and only compares the data,
/// without installing pages.
#[derive(Debug)]
pub(super) struct Stream {
    control: ControlStream,
    grant: LeaseGrant,
    stream: TcpStream,
    pages: usize,
}

impl Stream {
    /// Leases this many pages and fills them.
    pub(super) fn connect(donor: SocketAddr, pages: usize) -> Result<Self> {
        let bytes = (pages * PAGE_SIZE) as u64;
        let attached = floor::attach(donor, &Carrier::Tcp, bytes, TrafficClass::Urgent)?;
        let (control, grant, connection @ Connection::Tcp(_)) = attached else {
            bail!("TCP was asked for");
        };
        let stream = connection.into_tcp()?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let mut client = Self {
            control,
            grant,
            stream,
            pages,
        };
        client.pipeline(FrameKind::WritePage, FrameKind::Written, &mut |_, _| {})?;
        Ok(client)
    }

    /// Returns the number of its pages.
    pub(super) fn pages(&self) -> usize {
        self.pages
    }

    /// Reads all pages in order. Returns the duration and the number of wrong bytes.
    pub(super) fn read(&mut self) -> Result<(Duration, u64)> {
        let mut corrupt = 0;
        let started = Instant::now();
        self.pipeline(
            FrameKind::ReadPage,
            FrameKind::PageData,
            &mut |page, bytes| {
                corrupt += corrupt_bytes(page, bytes);
            },
        )?;
        Ok((started.elapsed(), corrupt))
    }

    /// Requests a run of pages, which [`Self::receive`] takes.
    pub(super) fn request(&mut self, pages: std::ops::Range<usize>) -> Result<()> {
        let stamp = floor::ends().stamp();
        let mut output = Vec::with_capacity(pages.len() * HEADER_BYTES);
        for page in pages {
            let frame = Frame::new(
                FrameKind::ReadPage,
                page as u64,
                (page * PAGE_SIZE) as u64,
                false,
            );
            output.extend(frame.with_stamp(stamp).encode(&[]));
        }
        Ok(self.stream.write_all(&output)?)
    }

    /// Receives a run of pages that were requested, each in its place, without copying.
    pub(super) fn receive(&mut self, pages: &mut [PageBytes]) -> Result<()> {
        const FRAME_BYTES: usize = HEADER_BYTES + PAGE_SIZE;
        let mut headers = vec![[0; HEADER_BYTES]; pages.len()];
        let mut filled = 0;
        while filled < pages.len() * FRAME_BYTES {
            let (first, mut skip) = (filled / FRAME_BYTES, filled % FRAME_BYTES);
            let parts = headers.iter_mut().zip(pages.iter_mut()).skip(first);
            let parts = parts.flat_map(|(header, page)| [&mut header[..], &mut page[..]]);
            let mut targets: Vec<_> = parts
                .map(|part| {
                    let skipped = skip.min(part.len());
                    skip -= skipped;
                    IoSliceMut::new(&mut part[skipped..])
                })
                .collect();
            let count = self.stream.read_vectored(&mut targets)?;
            ensure!(count > 0, "the donor closed the connection");
            filled += count;
        }
        for header in &headers {
            let kind = Frame::decode(header)?.kind;
            ensure!(kind == FrameKind::PageData, "{kind:?} instead of a page");
        }
        Ok(())
    }

    /// Ends the lease.
    pub(super) fn release(mut self) -> Result<()> {
        let token = self.grant.token;
        let _: LeaseStatus = self
            .control
            .call(FrameKind::Release, &token, FrameKind::Status)?;
        Ok(())
    }

    /// Sends a request for each page, with at most [`IN_FLIGHT_MAX`] outstanding.
    fn pipeline(
        &mut self,
        request: FrameKind,
        answer: FrameKind,
        take: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        let mut input = vec![0; INPUT_BYTES];
        let mut filled = 0;
        let mut output = Vec::with_capacity(IN_FLIGHT_MAX * (HEADER_BYTES + PAGE_SIZE));
        let (mut asked, mut answered) = (0, 0);
        let stamp = floor::ends().stamp();
        while answered < self.pages {
            output.clear();
            while asked < self.pages && asked - answered < IN_FLIGHT_MAX {
                let frame = Frame::new(request, asked as u64, (asked * PAGE_SIZE) as u64, false);
                let frame = frame.with_stamp(stamp);
                if request == FrameKind::WritePage {
                    let page = page_bytes(asked);
                    output.extend(frame.encode(&page));
                    output.extend(page);
                } else {
                    output.extend(frame.encode(&[]));
                }
                asked += 1;
            }
            self.stream.write_all(&output)?;
            let count = self.stream.read(&mut input[filled..])?;
            ensure!(count > 0, "the donor closed the connection");
            filled += count;
            let mut start = 0;
            while let Some((header, rest)) =
                input[start..filled].split_first_chunk::<HEADER_BYTES>()
            {
                let frame = Frame::decode(header)?;
                let Some(payload) = rest.get(..frame.length) else {
                    break;
                };
                ensure!(
                    frame.kind == answer && frame.request == answered as u64,
                    "{:?} for request {}, {answer:?} for {answered} was expected",
                    frame.kind,
                    frame.request
                );
                take(answered, payload);
                answered += 1;
                start += HEADER_BYTES + frame.length;
            }
            input.copy_within(start..filled, 0);
            filled -= start;
        }
        Ok(())
    }
}

fn corrupt_bytes(page: usize, bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    let differing = words
        .iter()
        .enumerate()
        .map(|(word, &found)| differing_bytes(u64::from_ne_bytes(found), content(page, word)));
    differing.sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory_fabric::donor::server::{Donor, DonorConfig};
    use memory_fabric::rdma::DeviceChoice;

    #[test]
    fn what_was_written_is_read_back_and_a_wrong_byte_is_counted() {
        let donor = Donor::start(&DonorConfig {
            credentials: None,
            listen: ([127, 0, 0, 1], 0).into(),
            memory_bytes: 4 << 20,
            lease_duration_max: Duration::from_secs(60),
            spin: Duration::ZERO,
            rdma: DeviceChoice::None,
            allow: None,
        })
        .expect("a donor");
        // More than the window, and not a multiple of it.
        let mut stream = Stream::connect(donor.address(), 1000).expect("connects");
        assert_eq!(stream.read().expect("reads").1, 0);
        stream.release().expect("released");
        assert_eq!(donor.pool().lent_bytes(), 0);

        let mut page = page_bytes(3);
        assert_eq!(corrupt_bytes(3, &page), 0);
        page[77] ^= 1;
        assert_eq!(corrupt_bytes(3, &page), 1);
    }
}
