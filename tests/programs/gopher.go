// SPDX-License-Identifier: Apache-2.0 OR MIT

// A Go program, whose runtime makes system calls itself, without libc, and never waits in one: it
// says what its standard library sees of connections.
//
//	gopher server ADDRESS CLIENT
//	gopher client ADDRESS CLIENT CLOSED
//
// ADDRESS is where the server listens, CLIENT the host that connects, CLOSED where nobody listens.
package main

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	flows = 40
	size  = 200000
)

func must(err error) {
	if err != nil {
		fmt.Println("given up:", err)
		os.Exit(1)
	}
}

func digest(bytes []byte) uint64 {
	sum := fnv.New64a()
	sum.Write(bytes)
	return sum.Sum64()
}

func payload(seed int) []byte {
	bytes := make([]byte, size)
	for i := range bytes {
		bytes[i] = byte(i*(seed+3) + i/251)
	}
	return bytes
}

// name says the host, and not the port.
func name(address net.Addr, known map[string]string) string {
	host, _, err := net.SplitHostPort(address.String())
	must(err)
	if name, ok := known[host]; ok {
		return name
	}
	return host
}

func serve(address string, known map[string]string) {
	listener, err := net.Listen("tcp", address)
	must(err)
	fmt.Println("listening")
	var all sync.WaitGroup
	for i := 0; i < flows+1; i++ {
		conn, err := listener.Accept()
		must(err)
		if i == 0 {
			fmt.Println("from", name(conn.RemoteAddr(), known), "to", name(conn.LocalAddr(), known))
		}
		all.Add(1)
		go func() {
			defer all.Done()
			_, err := io.Copy(conn, conn)
			must(err)
			must(conn.Close())
		}()
	}
	all.Wait()
	fmt.Println("served")
}

func ask(address, closed string, known map[string]string) {
	_, err := net.DialTimeout("tcp", closed, 5*time.Second)
	fmt.Println("refused:", errors.Is(err, syscall.ECONNREFUSED))

	conn, err := net.DialTimeout("tcp", address, 5*time.Second)
	must(err)
	fmt.Println("from", name(conn.LocalAddr(), known), "to", name(conn.RemoteAddr(), known))
	must(conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond)))
	_, err = conn.Read(make([]byte, 1))
	fmt.Println("deadline:", errors.Is(err, os.ErrDeadlineExceeded))
	must(conn.SetReadDeadline(time.Time{}))
	_, err = conn.Write([]byte("hello"))
	must(err)
	must(conn.(*net.TCPConn).CloseWrite())
	back, err := io.ReadAll(conn)
	must(err)
	fmt.Printf("%q\n", back)

	var all sync.WaitGroup
	var good sync.Map
	for i := 0; i < flows; i++ {
		all.Add(1)
		go func(i int) {
			defer all.Done()
			conn, err := net.Dial("tcp", address)
			must(err)
			sent := payload(i)
			go func() {
				_, err := conn.Write(sent)
				must(err)
				must(conn.(*net.TCPConn).CloseWrite())
			}()
			got, err := io.ReadAll(conn)
			must(err)
			good.Store(i, len(got) == size && digest(got) == digest(sent))
		}(i)
	}
	all.Wait()
	count := 0
	good.Range(func(_, value any) bool {
		if value.(bool) {
			count++
		}
		return true
	})
	fmt.Println(count, "of", flows)
}

func main() {
	host, _, err := net.SplitHostPort(os.Args[2])
	must(err)
	known := map[string]string{host: "server", os.Args[3]: "client"}
	if os.Args[1] == "server" {
		serve(os.Args[2], known)
	} else {
		ask(os.Args[2], os.Args[4], known)
	}
}
